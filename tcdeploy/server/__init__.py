"""An OpenAI-compatible server over a warmed engine, which never compiles on a request."""
