"""``make demo``: the main job on real parts, once."""
