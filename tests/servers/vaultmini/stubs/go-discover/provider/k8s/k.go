package k8s

import "log"

type Provider struct{}

func (*Provider) Addrs(map[string]string, *log.Logger) ([]string, error) { return nil, nil }
func (*Provider) Help() string                                           { return "" }
