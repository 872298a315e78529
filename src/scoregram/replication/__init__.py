"""The paper's experiment, end to end: run, judged claim by claim, and kept in a record that anyone can verify."""
