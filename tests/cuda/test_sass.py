"""What counts as a loop of products, and as a spill in one."""

import pytest

from tests.cuda.sass import loops_in_text, spills_in_text


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
    assert loops_in_text("Fatbin elf code:\n================\n") is None


def test_loops_of_products_are_the_innermost() -> None:
    """Two of them, inside one over work that has a peeled round of its own; a loop without products is none."""
    first = ["IADD3 R1, R1, 1, RZ", "HGMMA.64x32x16.F32 R24, R72, gdesc[UR16], R24", "@P0 BRA 0x10"]
    peeled = ["HGMMA.64x32x16.F32 R24, R72, gdesc[UR16], R24"]
    second = ["R2UR UR4, R2", "HGMMA.64x32x16.F32 R24, R72, gdesc[UR16], R24", "@!P1 BRA 0x50"]
    without = ["NOP", "@P2 BRA 0x80"]
    found = loops_in_text(_listing("NOP", *first, *peeled, *second, *without, "@P3 BRA 0x0", "EXIT"))
    assert found == [first, second]
