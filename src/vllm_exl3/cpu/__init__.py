"""The CPU kernels: a C++ library behind a plain C interface, loaded with ctypes."""
