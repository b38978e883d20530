// vaultmini is HashiCorp Vault itself (its core, its transit engine, its HTTP interface), kept in memory and listening
// on loopback: what the tests need of it, in a program that is built in a minute or two. It prints "READY <url>".
//
// The modules under stubs stand for parts that are never called: automatic unsealing by clouds, and their discovery.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"

	log "github.com/hashicorp/go-hclog"
	"github.com/hashicorp/vault/builtin/logical/transit"
	"github.com/hashicorp/vault/helper/namespace"
	vaulthttp "github.com/hashicorp/vault/http"
	"github.com/hashicorp/vault/internalshared/configutil"
	"github.com/hashicorp/vault/sdk/helper/consts"
	"github.com/hashicorp/vault/sdk/logical"
	"github.com/hashicorp/vault/sdk/physical/inmem"
	"github.com/hashicorp/vault/vault"
)

// onlyTransit is the registry of built-in plugins.
type onlyTransit struct{}

func (onlyTransit) Contains(name string, kind consts.PluginType) bool {
	return name == "transit" && kind == consts.PluginTypeSecrets
}

func (r onlyTransit) Get(name string, kind consts.PluginType) (func() (interface{}, error), bool) {
	return func() (interface{}, error) { return transit.Factory, nil }, r.Contains(name, kind)
}

func (onlyTransit) Keys(kind consts.PluginType) []string {
	if kind == consts.PluginTypeSecrets {
		return []string{"transit"}
	}
	return nil
}

func (r onlyTransit) DeprecationStatus(name string, kind consts.PluginType) (consts.DeprecationStatus, bool) {
	return consts.Supported, r.Contains(name, kind)
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	address := flag.String("listen", "127.0.0.1:0", "address and port; 0 is any")
	token := flag.String("token", "root", "the token that may do everything")
	flag.Parse()

	logger := log.New(&log.LoggerOptions{Output: os.Stderr, Level: log.Error})
	storage, err := inmem.NewInmem(nil, logger)
	must(err)
	core, err := vault.NewCore(&vault.CoreConfig{
		Physical:        storage,
		Logger:          logger,
		DisableMlock:    true,
		DevToken:        *token,
		LogicalBackends: map[string]logical.Factory{"transit": transit.Factory},
		BuiltinRegistry: onlyTransit{},
	})
	must(err)

	ctx := namespace.ContextWithNamespace(context.Background(), namespace.RootNamespace)
	seal := &vault.SealConfig{SecretShares: 1, SecretThreshold: 1, StoredShares: 1}
	made, err := core.Initialize(ctx, &vault.InitParams{BarrierConfig: seal})
	must(err)
	_, err = core.Unseal(append([]byte(nil), made.SecretShares[0]...))
	must(err)

	ask := func(as, path string, data map[string]interface{}) {
		request := &logical.Request{
			ID: "setup", Operation: logical.UpdateOperation, ClientToken: as, Path: path, Data: data,
		}
		answer, err := core.HandleRequest(ctx, request)
		must(err)
		if answer != nil && answer.IsError() {
			must(answer.Error())
		}
	}
	ask(made.RootToken, "auth/token/create", map[string]interface{}{
		"id": *token, "policies": []string{"root"}, "no_parent": true, "no_default_policy": true,
	})
	ask(*token, "sys/mounts/transit", map[string]interface{}{"type": "transit"})

	listener, err := net.Listen("tcp", *address)
	must(err)
	fmt.Printf("READY http://%s\n", listener.Addr())
	must(http.Serve(listener, vaulthttp.Handler.Handler(&vault.HandlerProperties{
		Core:           core,
		ListenerConfig: &configutil.Listener{Type: "tcp", Address: listener.Addr().String()},
	})))
}
