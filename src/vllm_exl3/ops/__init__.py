"""The custom ops: one schema, one plain PyTorch reference and one backend file per device each."""
