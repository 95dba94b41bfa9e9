"""The privacy audit: what samples disclose about the people that a model was trained on."""
