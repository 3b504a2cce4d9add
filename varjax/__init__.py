"""varjax: visual autoregressive models in JAX with every KV-cache policy under one API."""
