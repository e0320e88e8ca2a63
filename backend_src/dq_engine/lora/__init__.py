"""Adapters: their files, their slots on the device, who uses them."""
