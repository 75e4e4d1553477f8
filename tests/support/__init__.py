"""What all tests share: processes to run them on, a job trained in one process, and one comparison of the two."""
