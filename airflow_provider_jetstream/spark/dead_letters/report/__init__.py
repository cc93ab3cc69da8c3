"""The HTML report of dead letters."""
