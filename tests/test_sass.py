"""The check of machine code (sass.py) finds registers that a path reads unwritten, and accepts correct code."""

from __future__ import annotations

import pytest

from tests.sass import unwritten_in

ACCEPTED = """
.text._kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   ULDC.64 UR40, c[0x0][0x208] ;
        /*0020*/                   LDG.E.128 R12, desc[UR40][R1.64] ;
        /*0030*/                   ISETP.GE.AND P0, PT, R15, 0x1, PT ;
        /*0040*/                   PRMT R37, RZ, 0x7610, R37 ;
        /*0048*/                   UPRMT UR60, UR40, 0x7632, UR60 ;
        /*0050*/                   UMOV UR42, 0x100 ;
        /*0060*/                   UMOV UR43, 0x40000040 ;
        /*0070*/               @P0 BRA `(.L_x_1) ;
        /*0080*/                   UIADD3 UR44, UP0, UR42, 0x40, URZ ;
        /*0090*/                   UIADD3.X UR45, UR43, -0x7fffffe0, URZ, UP0, !UPT ;
        /*00a0*/                   UIADD3.64 UR46, UR42, 0x2, URZ ;
.L_x_0:
        /*00b0*/                   HGMMA.64x32x16.F32 R56, R12, gdesc[UR42].tnspB, RZ, !UPT ;
        /*00b8*/                   HGMMA.64x32x16.F32 R56, gdesc[UR44].tnspB, R56, gsb0 ;
        /*00ba*/                   UMOV UR52, 0x1 ;
        /*00bb*/                   UMOV UR53, 0x0 ;
        /*00bc*/                   DADD R8, R8, UR52 ;
        /*00bd*/                   IMAD.WIDE.U32 R8, R4, 0x4, UR52 ;
        /*00c0*/                   SHFL.BFLY P1, R4, R71, 0x1, 0x1f ;
        /*00d0*/               @P1 FADD R5, R4, R56 ;
        /*00e0*/                   CALL.REL.NOINC `($_kernel$divide) ;
        /*00f0*/                   IMAD R6, R20, UR50, R5 ;
        /*0100*/              @!P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0110*/                   STG.E.64 desc[UR40][R12.64], R14 ;
        /*0120*/                   EXIT ;
        .type           $_kernel$divide,@function
$_kernel$divide:
        /*0128*/                   MUFU.RCP R20, R4 ;
        /*0130*/                   UMOV UR50, 0x2 ;
        /*0140*/                   RET.REL.NODEC R4 `(_kernel) ;
.L_x_2:
        /*0150*/                   BRA `(.L_x_2);
"""
PRODUCTS = ["HGMMA.64x32x16.F32 R56, R12, gdesc[UR42]", "HGMMA.64x32x16.F32 R56, gdesc[UR44]"]


def test_code_that_writes_what_it_reads_is_accepted() -> None:
    assert unwritten_in(ACCEPTED) == []


@pytest.mark.parametrize(
    ("removed", "reading"),
    [
        ("UMOV UR42, 0x100", ["UIADD3 UR44,", "UIADD3.64 UR46,"]),  # what ptxas 12.8 left out
        ("UMOV UR43, 0x40000040", ["UIADD3.X UR45,", "UIADD3.64 UR46,"]),
        ("UIADD3 UR44, UP0, UR42, 0x40, URZ", ["UIADD3.X UR45,", *PRODUCTS]),  # the carry, and descriptors
        ("UIADD3.X UR45, UR43, -0x7fffffe0, URZ, UP0, !UPT", PRODUCTS),
        ("UIADD3.64 UR46, UR42, 0x2, URZ", PRODUCTS[1:]),
        ("ULDC.64 UR40, c[0x0][0x208]", ["LDG", "UPRMT", "STG"]),
        ("ISETP.GE.AND P0, PT, R15, 0x1, PT", ["@P0 BRA", "@!P0 BRA"]),
        ("SHFL.BFLY P1, R4, R71, 0x1, 0x1f", ["@P1 FADD"]),
        ("UMOV UR50, 0x2", ["IMAD"]),
        ("UMOV UR52, 0x1", ["DADD", "IMAD.WIDE"]),
        ("UMOV UR53, 0x0", ["DADD", "IMAD.WIDE"]),  # the second half
    ],
)
def test_each_instruction_that_reads_what_nothing_wrote_is_found(removed: str, reading: list[str]) -> None:
    assert removed in ACCEPTED
    found = unwritten_in(ACCEPTED.replace(removed, "NOP"))
    assert len(found) == len(reading)
    assert all(text.startswith(start) for text, start in zip(found, reading, strict=True))


def test_a_branch_does_not_write_its_predicate() -> None:
    code = ACCEPTED.replace("@P0 BRA `(.L_x_1)", "BRA.U UP3, `(.L_x_1)")
    assert [text for text in unwritten_in(code) if "UP3" in text] == ["BRA.U UP3, `(.L_x_1)"]


def test_a_register_that_only_one_of_two_paths_writes_is_found() -> None:
    code = ACCEPTED.replace("STG.E.64 desc[UR40]", "STG.E.64 desc[UR46]")  # the branch at 0070 skips the write
    assert [text.split()[0] for text in unwritten_in(code)] == ["STG.E.64"]


def test_empty_code_is_refused() -> None:
    with pytest.raises(AssertionError, match="no machine code"):
        unwritten_in("")
