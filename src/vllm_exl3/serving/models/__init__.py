"""What single model families need beyond the common path: one file a family, each with its reason."""
