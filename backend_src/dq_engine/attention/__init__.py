"""Attention behind one interface: flash-attn where it takes the device, dtype and head size, else torch's SDPA."""
