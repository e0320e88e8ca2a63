"""The AudioVAE: a streaming decoder with state per slot, and the encoder of recordings."""
