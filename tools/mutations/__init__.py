"""Changes of the package that the tests must notice, and a program that makes them."""
