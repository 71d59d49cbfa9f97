"""Files that other programs read and write: profile.json, plan.json."""
