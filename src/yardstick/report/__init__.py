"""Tables, plots and the record, made from summaries and positions; no model is run here."""
