"""Gates and captures: from models, modes and dumps to measurements and verdicts."""
