"""Links from a task to the page that shows the queues."""
