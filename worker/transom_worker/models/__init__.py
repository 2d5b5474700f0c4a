"""The model families, one file per family or group of similar families, over shared layers."""
