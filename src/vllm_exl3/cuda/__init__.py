"""Own CUDA kernels: sources compiled by NVRTC for the exact GPU, launched through cuda-bindings.

Needs torch with CUDA, ``cuda-bindings`` and ``nvidia-cuda-nvrtc`` (torch's CUDA wheels bring both). Compiling needs no
GPU. Importing this package loads none of them.
"""
