"""What operators share: identity, error mapping, template values, the Spark process."""
