"""Programs and helpers around EXL3 packs that serving itself never needs."""
