"""Arithmetic about packs that needs neither a GPU nor torch: what fits where, and which splits are legal."""
