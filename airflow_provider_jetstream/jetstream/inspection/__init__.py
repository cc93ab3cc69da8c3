"""The state of a queue for people and sensors: health, overview, drained."""
