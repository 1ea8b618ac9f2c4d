"""The demo: a real language model, quantized to EXL3 here, served by stock vLLM and asked two questions."""
