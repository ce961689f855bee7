"""An OpenAI-compatible HTTP server and the command line, over whichever engine the command line names."""
