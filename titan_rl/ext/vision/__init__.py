"""Images in prompts: a frozen vision tower beside the text model that is trained."""
