"""What happened in a job, from the events that its drivers wrote: where the time went, and what interruptions cost."""
