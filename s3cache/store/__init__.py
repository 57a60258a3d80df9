"""Byte stores behind one small async protocol, and wrappers that nest over any of them."""
