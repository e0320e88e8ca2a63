"""`voxcpm-generate`: a manifest of texts to a folder of wav files and a table, all slots of an engine kept busy."""
