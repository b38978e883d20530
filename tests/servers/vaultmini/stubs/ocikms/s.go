package ocikms

import wrapping "github.com/hashicorp/go-kms-wrapping/v2"

type Wrapper struct{ wrapping.Wrapper }

func NewWrapper() *Wrapper { panic("stub") }

const (
	KmsConfigKeyId              = "key_id"
	KmsConfigCryptoEndpoint     = "crypto_endpoint"
	KmsConfigManagementEndpoint = "management_endpoint"
)
