package awskms

import wrapping "github.com/hashicorp/go-kms-wrapping/v2"

type Wrapper struct{ wrapping.Wrapper }

func NewWrapper() *Wrapper { panic("stub") }
func WithLogger(any) wrapping.Option {
	return func() interface{} { return wrapping.OptionFunc(func(*wrapping.Options) error { return nil }) }
}
