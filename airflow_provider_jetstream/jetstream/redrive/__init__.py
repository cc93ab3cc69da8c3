"""Redrive: dead letters become jobs with fresh deliveries; no crash at any point loses or repeats one."""
