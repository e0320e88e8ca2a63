"""How models/small was made: sentences spoken by flite, an AudioVAE, language models, an adapter. See README.md."""
