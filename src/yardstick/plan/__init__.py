"""What an experiment takes, before anything is downloaded."""
