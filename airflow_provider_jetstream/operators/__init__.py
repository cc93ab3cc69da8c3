"""Operators that provision, publish and redrive."""
