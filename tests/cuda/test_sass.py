"""What counts as a spill in a loop of products."""

import pytest

from tests.cuda.sass import spills_in_text


def _listing(*instructions: str) -> str:
    """As cuobjdump prints code: an address, an instruction, its encoding."""
    return "\n".join(f"        /*{16 * i:04x}*/    {text} ;    /* 0x0 */" for i, text in enumerate(instructions))


@pytest.mark.parametrize(
    ("instructions", "spills"),
    [
        (("STL [R1], R2", "HGMMA.64x64x16.F32 R24, R72, gdesc[UR16], R24", "@P0 BRA 0x10", "LDL R2, [R1]"), 0),
        (("LDL R2, [R1]", "IMMA.16832.S8.S8 R4, R8.ROW, R10.COL, R4", "STL.64 [R1], R2", "@!P0 BRA 0x0"), 2),
        # in the loop over work, beside one of products and a round peeled off it
        (("NOP", "HMMA.16816.F32 R4, R8, R10, R4", "@P0 BRA 0x10", "STL [R1], R2", "HMMA.16816.F32 R4, R8, R10, R4",
          "@P1 BRA 0x0"), 0),
        (("STL [R1], R2", "@P0 BRA 0x0", "EXIT"), 0),
    ],
)  # fmt: skip
def test_spills_in_loops_of_products(instructions: tuple[str, ...], spills: int) -> None:
    found = spills_in_text(_listing(*instructions))
    assert found is not None and len(found) == spills


def test_no_code_is_not_taken_for_code_without_spills() -> None:
    assert spills_in_text("Fatbin elf code:\n================\n") is None
