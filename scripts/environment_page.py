"""Writes docs/environment.md from src/vllm_exl3/env.py; ``--check`` only says whether it is current."""

import argparse
import sys

from generated import ROOT, write_or_check

from vllm_exl3 import env

PAGE = ROOT / "docs" / "environment.md"

HEAD = """# Environment variables

Made by `make docs` from `src/vllm_exl3/env.py`; edit that file instead of this one.

All names begin with `VLLM_EXL3_`. The variables are read when they are needed, in every process of the engine, so set
them before starting `vllm serve`. A value that a variable does not accept stops start-up, with a message that names the
variable and the values it accepts. A variable that is set and changes nothing, because another one rules it out, is
named when a pack is loaded and by `vllm-exl3 doctor`.

| variable | default | what it does |
|---|---|---|
"""

TAIL = """
vLLM warns about every variable that begins with `VLLM_` and is not its own, including these ("Unknown vLLM environment
variable detected"), and refuses to start with `--fail-on-environ-validation`. Without that flag they take effect.

`VLLM_EXL3_NO_NATIVE=1` has an effect only while installing from a checkout: it leaves out the CPU kernels, as on a
machine without a C++ compiler.
"""


def page() -> str:
    """The page's text."""
    rows = []
    for variable in env.VARIABLES:
        also = f" Also read as {', '.join(f'`{name}`' for name in variable.aliases)}." if variable.aliases else ""
        default = f"`{variable.default}`" if variable.default else "unset"
        rows.append(f"| `{variable.name}` | {default} | {variable.help}{also} |\n")
    return HEAD + "".join(rows) + TAIL


def main() -> int:
    """Write the page, or with ``--check`` compare."""
    parser = argparse.ArgumentParser(description="Write docs/environment.md from src/vllm_exl3/env.py.")
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    return write_or_check({PAGE: page()}, check=parser.parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
