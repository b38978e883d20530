// vaultmini is HashiCorp Vault itself (its core, its transit engine, its logins by AppRole, JWT and certificate, its HTTP
// interface), kept in memory and listening on loopback: what the tests need of it, in a program that is built in a
// minute or two. It prints "READY <url>". With -cert and -key it speaks TLS, and asks clients for certificates.
//
// The modules under stubs stand for parts that are never called: automatic unsealing by clouds, and their discovery.
package main

import (
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"

	log "github.com/hashicorp/go-hclog"
	jwt "github.com/hashicorp/vault-plugin-auth-jwt"
	"github.com/hashicorp/vault/builtin/credential/approle"
	"github.com/hashicorp/vault/builtin/credential/cert"
	"github.com/hashicorp/vault/builtin/logical/transit"
	"github.com/hashicorp/vault/helper/namespace"
	vaulthttp "github.com/hashicorp/vault/http"
	"github.com/hashicorp/vault/internalshared/configutil"
	"github.com/hashicorp/vault/sdk/helper/consts"
	"github.com/hashicorp/vault/sdk/logical"
	"github.com/hashicorp/vault/sdk/physical/inmem"
	"github.com/hashicorp/vault/vault"
)

var engines = map[string]logical.Factory{"transit": transit.Factory}
var logins = map[string]logical.Factory{"approle": approle.Factory, "cert": cert.Factory, "jwt": jwt.Factory}

// builtins is the registry of built-in plugins.
type builtins struct{}

func (builtins) of(kind consts.PluginType) map[string]logical.Factory {
	switch kind {
	case consts.PluginTypeSecrets:
		return engines
	case consts.PluginTypeCredential:
		return logins
	}
	return nil
}

func (r builtins) Contains(name string, kind consts.PluginType) bool {
	_, found := r.of(kind)[name]
	return found
}

func (r builtins) Get(name string, kind consts.PluginType) (func() (interface{}, error), bool) {
	factory, found := r.of(kind)[name]
	return func() (interface{}, error) { return factory, nil }, found
}

func (r builtins) Keys(kind consts.PluginType) []string {
	names := []string{}
	for name := range r.of(kind) {
		names = append(names, name)
	}
	return names
}

func (r builtins) DeprecationStatus(name string, kind consts.PluginType) (consts.DeprecationStatus, bool) {
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
	certFile := flag.String("cert", "", "the certificate, for TLS")
	keyFile := flag.String("key", "", "its key")
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
		LogicalBackends: engines, CredentialBackends: logins,
		BuiltinRegistry: builtins{},
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
	scheme := "http"
	if *certFile != "" {
		pair, err := tls.LoadX509KeyPair(*certFile, *keyFile)
		must(err)
		scheme = "https"
		listener = tls.NewListener(listener, &tls.Config{
			Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequestClientCert,
		})
	}
	fmt.Printf("READY %s://%s\n", scheme, listener.Addr())
	must(http.Serve(listener, vaulthttp.Handler.Handler(&vault.HandlerProperties{
		Core:           core,
		ListenerConfig: &configutil.Listener{Type: "tcp", Address: listener.Addr().String()},
	})))
}
