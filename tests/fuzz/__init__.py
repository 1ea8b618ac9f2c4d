"""Damaged packs by the million: `mutations` makes them, `campaign` counts what becomes of them."""
