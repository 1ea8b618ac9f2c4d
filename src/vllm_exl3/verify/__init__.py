"""Checks a pack's contents: its tensors, this machine's decoders, and how far it is from the 16-bit model."""
