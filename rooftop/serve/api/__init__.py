"""OpenAI's API over HTTP: requests, streams, chat templates, tools and metrics."""
