"""Fetch what the experiment starts from: archives of the package index, hub repositories, local folders."""
