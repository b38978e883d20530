"""What tests run in processes of their own, by `support.program`. A process imports only the module it needs."""
