"""Audio in (containers, rates, channels) and audio out (formats, rates)."""
