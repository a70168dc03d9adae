"""The server: models over HTTP, many users in one batch, and each request drafted as it asks."""
