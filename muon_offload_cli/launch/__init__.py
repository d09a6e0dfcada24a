"""Running a job: what to run, running it, following it, judging it, saying why it died."""
