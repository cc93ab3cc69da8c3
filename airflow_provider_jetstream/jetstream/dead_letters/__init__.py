"""Dead letters: found, proved, preserved and selected."""
