"""VoxCPM2 as the engine runs it: loading, the language models, the diffusion of one patch."""
