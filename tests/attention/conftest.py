"""Triton's interpreter for every test here that launches a kernel on a CPU."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
