"""Checkpoints: published safetensors and Orbax, both ways.

`load.load` opens either kind, `write.save_published` and `orbax_io.save_orbax` write them; `names` says which
published tensor is which parameter, `accounting` that nothing is left over or missing.
"""
