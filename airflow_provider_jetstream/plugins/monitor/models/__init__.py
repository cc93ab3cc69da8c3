"""The models of the page's routes, as JSON; ``docs/monitor-api.md`` says which route returns which."""
