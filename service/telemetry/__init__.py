"""What operators see: metrics for Prometheus, traces for OpenTelemetry."""
